"""Block copies between host memory and HBM: API, dispatch, FFI calls, Pallas kernels."""
