"""Questions that were asked once, with a kept answer: not of the library, but about it."""
