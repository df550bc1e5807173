"""`verify` on Triton: speculative drafts accepted or corrected."""
