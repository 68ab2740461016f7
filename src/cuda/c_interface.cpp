// SPDX-License-Identifier: Apache-2.0
// What of the C interface needs CUDA.

#include "kvkeep/c_cuda.h"

#include "accelerator.h"
#include "boundary.h"
#include "chosen_stream.h"
#include "kvkeep/cuda.h"

namespace kvkeep::cuda {
namespace {

class ResourcesOfC final : public DeviceResources {
 public:
  explicit ResourcesOfC(const kvkeep_cuda_resources& of) : of_(of) {
    KVKEEP_REQUIRE(of.allocate != nullptr && of.free != nullptr,
                   "resources: allocate or free is NULL; allowed both, or no resources");
  }
  [[nodiscard]] void* stream() override { return of_.stream == nullptr ? nullptr : of_.stream(of_.context); }
  [[nodiscard]] void* allocate(std::int64_t bytes, void* stream) override {
    return of_.allocate(of_.context, static_cast<std::size_t>(bytes), stream);
  }
  void free(void* memory, std::int64_t bytes, void* stream) noexcept override {
    of_.free(of_.context, memory, static_cast<std::size_t>(bytes), stream);
  }

 private:
  const kvkeep_cuda_resources of_;
};

kvkeep_accelerator* made_with(int index, std::shared_ptr<DeviceResources> resources) {
  auto stream = std::make_shared<ChosenStream>(std::move(resources));
  return new kvkeep_accelerator{accelerator(index, stream), stream};
}

}  // namespace
}  // namespace kvkeep::cuda

extern "C" {

kvkeep_status kvkeep_cuda_accelerator_make(int32_t index, kvkeep_accelerator** accelerator) {
  return kvkeep::guarded([&] {
    kvkeep::required(accelerator, "accelerator") = nullptr;
    *accelerator = kvkeep::cuda::made_with(index, kvkeep::cuda::default_resources(index));
  });
}

kvkeep_status kvkeep_cuda_accelerator_make_with(int32_t index, const kvkeep_cuda_resources* resources,
                                                kvkeep_accelerator** accelerator) {
  return kvkeep::guarded([&] {
    kvkeep::required(accelerator, "accelerator") = nullptr;
    *accelerator = kvkeep::cuda::made_with(
        index, std::make_shared<kvkeep::cuda::ResourcesOfC>(kvkeep::given(resources, "resources")));
  });
}

kvkeep_status kvkeep_cuda_use_stream(kvkeep_accelerator* accelerator, void* stream) {
  return kvkeep::guarded([&] { kvkeep::required(accelerator, "accelerator").stream->use(stream); });
}

}  // extern "C"
