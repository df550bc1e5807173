"""advantage@1 and its companions in plain torch: scans over tokens, statistics over groups, whitening, shaping."""
