"""What several backends share: Philox, request tables, the graph engine, vocabulary shards, sums over rows and groups.

Importing this package loads no torch; its modules do.
"""
