"""The contracts of the ops: schemas, shape functions, arguments, tensor checks and fp32 references. Needs torch alone."""
