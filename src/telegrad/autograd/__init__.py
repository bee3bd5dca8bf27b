"""Differentiate through remote calls: one backward pass over the graphs of many workers."""
