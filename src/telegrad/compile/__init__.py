"""Remote calls, and the objects of distributed programs, inside of `torch.compile`."""
