// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A CUDA graph of what is launched on the current stream, on either machine.

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <optional>

#include "device.h"
#include "fresh_accelerator.h"
#include "kvkeep/torch.h"

namespace kvkeep::cuda {

/// A stream beside the default one, not current yet.
inline c10::Stream side_stream(const Device& on) {
  const c10::Device device = torch_device(on);
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

/// Tests that run on a stream beside the default one, which is the current one.
template <class Base = OnDevice>
class OnSideStream : public Base {
 protected:
  void SetUp() override {
    Base::SetUp();
    if (::testing::Test::IsSkipped()) return;
    side_.emplace(side_stream(fresh_accelerator()->device()));
    guard_.emplace(*side_);
  }
  [[nodiscard]] const c10::Stream& stream() const { return *side_; }

 private:
  std::optional<c10::Stream> side_;
  std::optional<c10::StreamGuard> guard_;
};

class CapturedGraph {
 public:
  /// Whatever waits, allocates or copies to the host in `work` is an error: streams are captured in the strictest mode.
  template <class Work>
  CapturedGraph(const c10::Stream& stream, Work&& work) : stream_(static_cast<cudaStream_t>(stream.native_handle())) {
    expect(cudaStreamSynchronize(stream_));
    expect(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    try {
      work();
    } catch (...) {
      if (cudaStreamEndCapture(stream_, &graph_) == cudaSuccess) cudaGraphDestroy(graph_);
      throw;
    }
    expect(cudaStreamEndCapture(stream_, &graph_));
    expect(cudaGraphInstantiate(&ready_, graph_, 0));
  }
  ~CapturedGraph() {
    cudaGraphExecDestroy(ready_);
    cudaGraphDestroy(graph_);
  }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  void replay() const {
    expect(cudaGraphLaunch(ready_, stream_));
    expect(cudaStreamSynchronize(stream_));
  }
  [[nodiscard]] std::ptrdiff_t nodes(cudaGraphNodeType of) const {
    std::size_t count = 0;
    expect(cudaGraphGetNodes(graph_, nullptr, &count));
    std::vector<cudaGraphNode_t> all(count);
    expect(cudaGraphGetNodes(graph_, all.data(), &count));
    return std::ranges::count_if(all, [&](cudaGraphNode_t node) {
      cudaGraphNodeType type{};
      expect(cudaGraphNodeGetType(node, &type));
      return type == of;
    });
  }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t ready_ = nullptr;
};

}  // namespace kvkeep::cuda
