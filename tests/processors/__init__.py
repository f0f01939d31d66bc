"""The same bits whatever the processor: small laws under each instruction set that a library can be forced to."""
