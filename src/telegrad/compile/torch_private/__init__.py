"""Everything that this room uses of torch without torch promising it.

Each private call sits behind one small function here, and nowhere else; each file opens with what
it relies upon, and tests/compile/test_torch_private.py tries it.
"""

from telegrad.compile.torch_private.dispatch import above_autograd, go_straight, set_grad_mode
from telegrad.compile.torch_private.fakes import Fakes, depends_on_data, hint_of, seems_true
from telegrad.compile.torch_private.guards import (
    Opaque,
    guard_aliases,
    guard_empty_hooks,
    guard_hooks_of_all_modules,
    guard_identity,
    guard_keys,
    guard_signs_of_zero,
)
from telegrad.compile.torch_private.reads import ASKING_GROUPS, Reading, guard_reads
from telegrad.compile.torch_private.tracing import (
    PASSES_THROUGH_DYNAMO,
    TRACING_BACKWARD,
    arguments_in,
    as_written,
    code_being_traced,
    collected,
    explain_constants,
    forget_graphs,
    once_traced,
    trace_again,
    trace_instead,
)

__all__ = [
    "ASKING_GROUPS",
    "PASSES_THROUGH_DYNAMO",
    "TRACING_BACKWARD",
    "Fakes",
    "Opaque",
    "Reading",
    "above_autograd",
    "arguments_in",
    "as_written",
    "code_being_traced",
    "collected",
    "depends_on_data",
    "explain_constants",
    "forget_graphs",
    "go_straight",
    "guard_aliases",
    "guard_empty_hooks",
    "guard_hooks_of_all_modules",
    "guard_identity",
    "guard_keys",
    "guard_reads",
    "guard_signs_of_zero",
    "hint_of",
    "once_traced",
    "seems_true",
    "set_grad_mode",
    "trace_again",
    "trace_instead",
]
