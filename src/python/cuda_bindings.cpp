// SPDX-License-Identifier: Apache-2.0
// Accelerators for Python (kvkeep/cuda.py). A module of its own, so that a package without kernels has all the rest.

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include "kvkeep/core/error.h"
#include "kvkeep/cuda.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvkeep::python {
namespace {

/// Functions of Python. Which stream is current is asked again for everything that is launched.
class Called final : public DeviceResources {
 public:
  /// stream: a callable, or None: the default stream; allocate and free: both, or None: a pool.
  Called(int index, nb::object stream, nb::object allocate, nb::object free)
      : stream_(std::move(stream)), allocate_(std::move(allocate)), free_(std::move(free)) {
    if (allocate_.is_none()) pool_ = cuda::pool_resources(index);
  }
  ~Called() override {
    if (Py_IsInitialized() == 0) {  // what Python held is gone
      for (nb::object* one : {&stream_, &allocate_, &free_}) one->release();
      return;
    }
    const nb::gil_scoped_acquire held;
    for (nb::object* one : {&stream_, &allocate_, &free_}) one->reset();
  }

  [[nodiscard]] void* stream() override {
    const nb::gil_scoped_acquire held;
    return stream_.is_none() ? nullptr : address_of(stream_());
  }
  [[nodiscard]] void* allocate(std::int64_t bytes, void* stream) override {
    if (pool_ != nullptr) return pool_->allocate(bytes, stream);
    const nb::gil_scoped_acquire held;
    return address_of(allocate_(bytes, number_of(stream)));
  }
  void free(void* memory, std::int64_t bytes, void* stream) noexcept override {
    if (pool_ != nullptr) return pool_->free(memory, bytes, stream);
    if (Py_IsInitialized() == 0) return;
    const nb::gil_scoped_acquire held;
    try {
      free_(number_of(memory), bytes, number_of(stream));
    } catch (nb::python_error& error) {  // nobody could be told
      error.discard_as_unraisable("kvkeep.cuda: free()");
    } catch (const std::exception&) {
    }
  }

 private:
  static void* address_of(nb::handle given) {
    return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(nb::int_(nb::object(nb::borrow(given)))));
  }
  static std::uintptr_t number_of(void* address) { return reinterpret_cast<std::uintptr_t>(address); }

  nb::object stream_, allocate_, free_;
  std::shared_ptr<DeviceResources> pool_;
};

}  // namespace
}  // namespace kvkeep::python

NB_MODULE(_kvkeep_cuda, m) {
  using namespace kvkeep;
  nb::module_::import_("kvkeep._kvkeep");  // has Machine and the errors
  m.def(
      "accelerator",
      [](int index, nb::object stream, nb::object allocate, nb::object free) {
        return cuda::accelerator(
            index, std::make_shared<python::Called>(index, std::move(stream), std::move(allocate), std::move(free)));
      },
      "index"_a, "stream"_a.none(), "allocate"_a.none(), "free"_a.none());
}
