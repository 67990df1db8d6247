"""Who can run a request (capabilities), who does (selector), and how (one folder or file a library)."""
