"""Models of other libraries on vattn's layers and caches."""
