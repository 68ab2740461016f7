# SPDX-License-Identifier: Apache-2.0
"""pytest -p over_device: attach() as if every model were on a GPU, over the execution model (KVKEEP_CUDA_MODEL=host),
whose device memory is that of torch's tensors on the CPU."""

import kvkeep.cuda
from kvkeep import hf

assert kvkeep.cuda.accelerator().device == "cpu", "the package is not built over the execution model"
projections, check, _, _ = hf.attach.__init__.__defaults__
hf.attach.__init__.__defaults__ = projections, check, 16, kvkeep.cuda.accelerator
