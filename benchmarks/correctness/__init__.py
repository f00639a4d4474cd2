"""Is the result right: beside other implementations, older versions, and after crashes. Each is run by itself."""
