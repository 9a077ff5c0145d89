"""Generation through the paged cache equals generation with a contiguous one, on a random and on a real model."""
