"""Everything that this room uses of torch without torch promising it.

Each private call sits behind one small function here, and nowhere else; each file opens with what
it relies upon, and tests/compile/test_torch_private.py tries it.
"""

from telegrad.compile.torch_private.dispatch import (
    above_autograd,
    differentiated_by_engine,
    go_straight,
    set_grad_mode,
)
from telegrad.compile.torch_private.fakes import (
    Fakes,
    asks_for_data,
    depends_on_data,
    hint_of,
    seems_true,
)
from telegrad.compile.torch_private.guards import (
    Opaque,
    guard_aliases,
    guard_callables,
    guard_empty_hooks,
    guard_hooks_of_all_modules,
    guard_identity,
    guard_keys,
    guard_signs_of_zero,
    look_into_frozen_objects,
)
from telegrad.compile.torch_private.reads import (
    ASKING_GROUPS,
    Reading,
    guard_reads,
)
from telegrad.compile.torch_private.tracing import (
    PASSES_THROUGH_DYNAMO,
    TRACING_BACKWARD,
    arguments_in,
    as_written,
    break_graph,
    code_being_traced,
    collected,
    explain_constants,
    forget_graphs,
    graph_is_inside,
    handles_errors,
    look_at_tensors,
    may_break_graph,
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
    "asks_for_data",
    "break_graph",
    "code_being_traced",
    "collected",
    "depends_on_data",
    "differentiated_by_engine",
    "explain_constants",
    "forget_graphs",
    "go_straight",
    "graph_is_inside",
    "guard_aliases",
    "guard_callables",
    "guard_empty_hooks",
    "guard_hooks_of_all_modules",
    "guard_identity",
    "guard_keys",
    "guard_reads",
    "guard_signs_of_zero",
    "handles_errors",
    "hint_of",
    "look_at_tensors",
    "look_into_frozen_objects",
    "may_break_graph",
    "once_traced",
    "seems_true",
    "set_grad_mode",
    "trace_again",
    "trace_instead",
]
