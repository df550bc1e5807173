"""`divergence` on Triton: KL, reverse KL, JSD and TV between a student and a teacher, in one or two reads of both."""
