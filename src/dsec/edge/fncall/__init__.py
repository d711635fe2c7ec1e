"""Function calls: short, stateless work in boxes of a resident container. docs/fncall.md."""
