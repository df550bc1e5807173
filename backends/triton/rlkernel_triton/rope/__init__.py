"""`rope` on Triton: queries and keys rotated by positions, normalized before where asked, in IEEE arithmetic."""
