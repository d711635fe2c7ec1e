"""Virtual machines: the engines that run them, templates of booted guests, and what a guest boots with."""
