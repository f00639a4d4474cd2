"""What the benchmarks share: timing in turns, tables and result files, the same models built by other libraries, a server."""
