// SPDX-License-Identifier: Apache-2.0
// Whatever a file holds that is whole by its checksum: restore() refuses it and changes nothing, or the sequence can go
// on, be cut back and leave.

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "arrays.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/parts/folds.h"
#include "oracle/random_case.h"

namespace {

using namespace kvkeep;
using kvkeep::testing::Array;

constexpr std::int32_t kHeads = 2, kDim = 8, kCapacity = 160;

ModelSpec model() {
  ModelSpec spec;
  spec.query_heads = spec.kv_heads = kHeads, spec.key_dim = spec.value_dim = kDim;
  spec.layers.resize(1);
  return spec;
}

/// An engine of one layer and one sequence.
struct Engine {
  Keeper keeper{
      model(),
      make_policy(
          "ams-tova,budget=24,interval=4,recent=4,window=3,sink=1,rest=fold,memory.max_span=8,memory.min_span=2"),
      {.surprisal = true, .reads_folded = true}};
  std::vector<LayerKv> cache{
      DenseKv{Array::zeros({1, kHeads, kCapacity, kDim}), Array::zeros({1, kHeads, kCapacity, kDim})}};
  std::vector<std::int32_t> lengths = {0, 0};
  oracle::Random random{5};

  void step(std::int32_t tokens) {
    const SequenceId id = 1;
    const std::vector<std::int32_t> indptr{0, tokens};
    const auto& kv = std::get<DenseKv>(cache.front());
    const Array queries = Array::zeros({tokens, kHeads, kDim}), out = Array::zeros({tokens, kHeads, kDim}),
                lse = Array::zeros({tokens, kHeads});
    for (std::int32_t h = 0; h < kHeads; ++h)
      for (std::int32_t t = 0; t < tokens; ++t)
        for (std::int32_t d = 0; d < kDim; ++d) {
          const std::int64_t slot = (std::int64_t{h} * kCapacity + lengths[static_cast<std::size_t>(h)] + t) * kDim + d;
          kv.keys.data<float>()[slot] = static_cast<float>(random.normal());
          kv.values.data<float>()[slot] = static_cast<float>(random.normal());
          queries.data<float>()[(t * kHeads + h) * kDim + d] = static_cast<float>(random.normal());
        }
    const Observation seen{
        .layer = 0, .sequences = {&id, 1}, .indptr = indptr, .queries = queries, .basis = QueryBasis::post_rope};
    keeper.observe(seen);
    for (std::int32_t& length : lengths) length += tokens;
    keeper.part<parts::Folds>().view(seen, {out, lse});
    keeper.bind(cache);
    keeper.step({{&id, 1}, {lengths, kHeads}});
  }
};

/// What an honest engine saved.
const io::SafetensorsFile& honest(const std::filesystem::path& path) {
  static const io::SafetensorsFile file = [&] {
    Engine engine;
    engine.keeper.join(1);
    engine.step(60);
    for (int i = 0; i < 10; ++i) engine.step(1);
    engine.keeper.save(1, path);
    return io::SafetensorsFile::open(path);
  }();
  return file;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::string folder = std::filesystem::temp_directory_path() / text("kvkeep-fuzz-restore-", ::getpid());
  const io::SafetensorsFile& file = honest(folder + "-honest");
  const std::filesystem::path path = folder + "-forged";
  StateTensors tensors;
  for (const std::string& name : file.names()) tensors.emplace_back(name, clone(file.tensor(name)));
  // Seven bytes a change: which tensor, where or how many less or more, four bytes to write.
  for (; size >= 7; data += 7, size -= 7) {
    Tensor& t = tensors[data[0] % tensors.size()].second;
    const std::size_t at = data[1] | static_cast<std::size_t>(data[2] & 0x7f) << 8;
    if (data[2] & 0x80)
      t = (data[3] & 1) != 0 && t.size(0) > 0
              ? Tensor(Array::cat({t, t.narrow(0, 0, 1 + static_cast<std::int64_t>(at) % t.size(0))}))
              : clone(t.narrow(0, 0, static_cast<std::int64_t>(at) % (t.size(0) + 1)));
    else if (t.nbytes() >= 4)
      std::memcpy(t.bytes() + at % (static_cast<std::size_t>(t.nbytes()) / 4) * 4, data + 3, 4);
  }
  write_state(path, {tensors, file.metadata()});
  Engine engine;
  try {
    engine.keeper.restore(1, path);
  } catch (const Error& refused) {
    if (std::string_view(refused.what()).find(path.string()) == std::string_view::npos || engine.keeper.knows(1) ||
        engine.keeper.part<parts::Folds>().far_bytes() > 0)
      std::abort();
    return 0;
  }
  for (std::int32_t h = 0; h < kHeads; ++h)
    engine.lengths[static_cast<std::size_t>(h)] = engine.keeper.physical_length(1, 0, h);
  try {
    for (int i = 0; i < 6 && std::ranges::max(engine.lengths) < kCapacity - 2; ++i) engine.step(i % 2 + 1);
    engine.keeper.truncate(1, engine.keeper.logical_length(1) - 1);
  } catch (const Error&) {
  }
  engine.keeper.leave(1);
  if (engine.keeper.part<parts::Folds>().far_bytes() > 0) std::abort();
  return 0;
}
