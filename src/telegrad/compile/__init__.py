"""Remote calls, and the objects of distributed programs, inside of `torch.compile`."""

from telegrad.compile.objects import guard_process_groups
from telegrad.compile.owner import declare_fake

guard_process_groups()

__all__ = ["declare_fake", "guard_process_groups"]
