"""Prefill with warpgroups that load, convert and multiply."""
