// In place of cuda/common/ptx.cuh, of which the simulated kernels use nothing.
#pragma once
