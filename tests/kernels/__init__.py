"""The CUDA sources without a device: compiled by NVRTC, and run on the host by an emulator."""
