// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What the compiled kernels take of a multiprocessor, by the table of docs/inside/cuda.md: a launch that a chip has no
/// room for is refused here, too.

#include <cstddef>
#include <map>
#include <string>
#include <string_view>

namespace kvkeep::cuda::model {

/// The most that any instance of a kernel takes on any chip.
struct Resources {
  int registers = 0;             ///< of a thread
  std::size_t shared_bytes = 0;  ///< static
};

/// By the kernel's name, without `_kernel`. Throws std::runtime_error if there is no such table.
[[nodiscard]] const std::map<std::string, Resources, std::less<>>& kernel_resources();

/// Of the kernel that is launched as `name`, or by a name that goes on after it; null for kernels of tests.
[[nodiscard]] const Resources* resources_of(std::string_view name);

/// Whether a block of a kernel has room in the registers and, of `most_shared` bytes, in the shared memory of a
/// multiprocessor. True for kernels of tests.
[[nodiscard]] bool has_room(std::string_view name, int threads, std::size_t dynamic_bytes, std::size_t most_shared);

}  // namespace kvkeep::cuda::model
