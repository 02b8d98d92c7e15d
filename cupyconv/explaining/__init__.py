"""Why the tensors of a layer are what they are, in words; pure, without data."""
