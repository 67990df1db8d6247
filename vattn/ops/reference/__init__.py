"""What each op computes, in plain torch and fp32: the specification that every backend is compared with."""
