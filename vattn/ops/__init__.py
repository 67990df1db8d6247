"""The contracts of the ops: schemas, shape functions, arguments, checks and fp32 references. Needs torch alone."""
