#include "kvkeep/core/row.h"

namespace kvkeep {
namespace {


void check_side(const char* side, const Tensor& t, std::int32_t layer, const ModelSpec& spec, std::int32_t dim) {
  require(t.defined() && t.dim() == 4, "cache: ", side, " of layer ", layer, " have ", t.defined() ? t.dim() : 0, " dimensions; allowed 4 [B, Hkv, capacity, D]");
  require(t.size(1) == spec.kv_heads && t.size(3) == dim, "cache: ", side, " of layer ", layer, " have shape [", t.size(0), ", ", t.size(1), ", ", t.size(2), ", ",
          t.size(3), "]; allowed [B, ", spec.kv_heads, ", capacity, ", dim, "] as the model spec says");
  require(t.stride(3) == 1 || dim == 1, "cache: ", side, " of layer ", layer, " have stride ", t.stride(3), " in the last dimension; allowed 1");
}

SlotAddress address(const Tensor& t, std::int64_t place, std::int32_t head, std::int64_t start) {
  const auto bytes = static_cast<std::int64_t>(t.element_size());
  return {static_cast<std::byte*>(t.data_ptr()) + (place * t.stride(0) + head * t.stride(1) + start * t.stride(2)) * bytes, t.stride(2) * bytes,
          t.size(3) * bytes};
}

}  // namespace

RowTable make_rows(const ModelSpec& spec, const CacheView& view, std::span<const std::int32_t> layers, std::span<const std::int32_t> due) {
  const auto n = view.sequences.size();
  require(view.layers.size() == spec.layers.size(), "cache: the view has ", view.layers.size(), " layers; allowed ", spec.layers.size(), " as the model spec says");
  require(view.lengths.rows_per_sequence == 1 || view.lengths.rows_per_sequence == spec.num_layers() * spec.kv_heads, "cache: lengths come with ",
          view.lengths.rows_per_sequence, " a sequence; allowed 1, or layers * KV heads = ", spec.num_layers() * spec.kv_heads);
  require(view.lengths.data.size() == n * static_cast<std::size_t>(view.lengths.rows_per_sequence), "cache: ", view.lengths.data.size(), " lengths for ", n,
          " sequences; allowed ", n * static_cast<std::size_t>(view.lengths.rows_per_sequence));
  require(view.places.empty() || view.places.size() == n, "cache: ", view.places.size(), " places for ", n, " sequences; allowed none or one each");
  require(view.starts.empty() || view.starts.size() == n, "cache: ", view.starts.size(), " starts for ", n, " sequences; allowed none or one each");

  RowTable table;
  for (const std::int32_t l : layers) {
    const LayerKv& layer = view.layers[static_cast<std::size_t>(l)];
    require(!std::holds_alternative<std::monostate>(layer), "cache: layer ", l, " has no rows; the model spec calls it a full layer");
    require<Unsupported>(std::holds_alternative<DenseKv>(layer), "cache: layer ", l, " is paged; this build cuts dense caches only");
    const auto& [keys, values] = std::get<DenseKv>(layer);
    check_side("keys", keys, l, spec, spec.key_dim);
    check_side("values", values, l, spec, spec.value_dim);
    require(keys.size(0) == values.size(0) && keys.size(2) == values.size(2), "cache: keys and values of layer ", l, " differ in batch or capacity; given [",
            keys.size(0), ", ", keys.size(2), "] and [", values.size(0), ", ", values.size(2), "]");
    require(keys.device() == values.device(), "cache: keys of layer ", l, " are on ", keys.device().str(), ", values on ", values.device().str(), "; allowed one device");
    if (l == layers.front()) {
      table.key_dtype = keys.scalar_type();
      table.value_dtype = values.scalar_type();
      table.device = keys.device();
    }
    require(keys.scalar_type() == table.key_dtype && values.scalar_type() == table.value_dtype, "cache: layer ", l, " holds ", c10::toString(keys.scalar_type()),
            " keys and ", c10::toString(values.scalar_type()), " values; allowed ", c10::toString(table.key_dtype), " and ", c10::toString(table.value_dtype),
            " as in the first layer");
    require(keys.device() == table.device, "cache: layer ", l, " is on ", keys.device().str(), "; allowed ", table.device.str(), " as the first layer");
    for (const std::int32_t i : due) {
      const auto s = static_cast<std::size_t>(i);
      const std::int64_t place = view.places.empty() ? i : view.places[s];
      const std::int64_t start = view.starts.empty() ? 0 : view.starts[s];
      require(place >= 0 && place < keys.size(0), "cache: sequence ", view.sequences[s], " is at place ", place, " of the batch; allowed 0 to ", keys.size(0) - 1);
      table.groups.push_back({l, i, static_cast<std::int64_t>(table.rows.size()), {}});
      for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
        const std::int32_t length = view.lengths.at(s, l * spec.kv_heads + h);
        require(start >= 0 && length >= 0 && start + length <= keys.size(2), "cache: sequence ", view.sequences[s], " holds slots ", start, " to ",
                start + std::int64_t{length}, " of layer ", l, "; allowed up to the capacity ", keys.size(2));
        table.rows.push_back({.layer = l,
                              .sequence = i,
                              .head = h,
                              .length = length,
                              .first = table.slots,
                              .keys = address(keys, place, h, start),
                              .values = address(values, place, h, start)});
        table.slots += length;
      }
    }
  }
  return table;
}

}  // namespace kvkeep
