"""Bytes and block ids of KV caches: layouts, specs, allocation, pool, copies. Knows no step and no kernel."""
