"""Which backends can run a request (capabilities), which one does (selector), and how (one folder or file each)."""
