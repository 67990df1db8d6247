"""Every stored format once: its name, its bytes, its reference encode and decode. Knows no layer and no device."""
