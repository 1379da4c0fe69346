"""Where keys and values are kept: on the device (resident), or in CPU memory (offload)."""
