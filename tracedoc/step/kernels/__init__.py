"""The compute kernels of the analysed step: what they do, against what the device reaches."""
