// The tables of kvkeep plan where the text decides how much is held: the least and the most.

#include "kvkeep/core/error.h"
#include "kvkeep/io/untrusted_json.h"
#include "plan.h"

namespace kvkeep::cli {
namespace {

using Json = nlohmann::ordered_json;

Cell range_cell(const Bounds& bytes) {
  return bytes.least == bytes.most
             ? bytes_cell(bytes.most)
             : Cell(bytes.most, text(bytes_cell(bytes.least).shown, " - ", bytes_cell(bytes.most).shown));
}

// One row for consecutive layers that are alike; bytes are per layer.
Table layers_between(const PlannedBounds& out) {
  Table table({{"layers", "layers", false},
               {"kind", "kind", false},
               {"full_slots", "full slots"},
               {"full_bytes", "per layer"},
               {"peak_slots", "peak slots"},
               {"peak_bytes", "near per layer"},
               {"kept_slots", "kept slots"},
               {"kept_bytes", "near per layer"},
               {"far_bytes", "far per layer"}});
  const std::vector<BoundedLayer>& layers = out.sequence.layers;
  for (std::size_t l = 0; l < layers.size();) {
    std::size_t last = l;
    while (last + 1 < layers.size() && out.spec.layers[last + 1].kind == out.spec.layers[l].kind &&
           layers[last + 1] == layers[l])
      ++last;
    const BoundedLayer& layer = layers[l];
    table.add({l == last ? std::to_string(l) : text(l, "-", last), kind_text(out.spec.layers[l].kind), layer.full_slots,
               bytes_cell(layer.full_bytes), slots_text(layer.peak_slots.least, layer.peak_slots.most),
               range_cell(layer.peak_bytes), slots_text(layer.kept_slots.least, layer.kept_slots.most),
               range_cell(layer.kept_bytes), range_cell(layer.far_bytes)});
    l = last + 1;
  }
  return table;
}

Table totals_between(const PlanOptions& o, const PlannedBounds& out) {
  Table table({{"what", "all layers", false},
               {"least", "least"},
               {"most", "most"},
               {"batch_least", text("batch of ", o.batch, ": least")},
               {"batch_most", "most"}});
  const auto add = [&](const char* what, const Bounds& bytes) {
    table.add({what, bytes_cell(bytes.least), bytes_cell(bytes.most), bytes_cell(bytes.least * o.batch),
               bytes_cell(bytes.most * o.batch)});
  };
  const BoundedForecast& s = out.sequence;
  add("full cache", Bounds::exactly(s.full_bytes));
  add("near at the peak", s.peak);
  add("near, kept", s.kept);
  if (out.policy.memory() != nullptr) add("factors, far", s.far);
  each_own(out.own, [&](const char* what, std::int64_t bytes) { add(what, Bounds::exactly(bytes)); });
  add("near at the peak, with kvkeep's own", s.peak + Bounds::exactly(out.own.sum()));
  return table;
}

std::string shown(const PlanOptions& o, const PlannedBounds& out) {
  const BoundedForecast& s = out.sequence;
  std::string head = text("A token takes ", bytes_cell(s.slot_bytes).shown, " of K and V in full layers (", o.dtype,
                          "). ", out.policy.name(), ": the text decides what it holds, between these bounds. Events: ",
                          slots_text(s.events.least, s.events.most), ".\n");
  if (out.policy.memory() != nullptr)
    head += text("Folded at the end, over all layers and heads: ", slots_text(s.folded.least, s.folded.most),
                 " slots in ", slots_text(s.spans.least, s.spans.most), " spans.\n");
  if (out.ragged) head += "Rows may end up unequal; slots are those of an average row.\n";
  return text(head, "\n", layers_between(out).markdown(), "\n", totals_between(o, out).markdown(),
              "\nIn the memory of ", o.batch, o.batch == 1 ? " full cache" : " full caches", " there is room for ",
              out.fits, out.fits == 1 ? " sequence" : " sequences", " at the most that they hold.\n");
}

Json between(const Bounds& bounds) { return {{"least", bounds.least}, {"most", bounds.most}}; }

std::string written(const PlanOptions& o, const PlannedBounds& out) {
  const BoundedForecast& s = out.sequence;
  Json all{{"model", o.model.empty() ? o.shape : o.model},
           {"policy", Json::parse(out.policy.to_json())},
           {"dtype", o.dtype},
           {"batch", o.batch},
           {"length", o.length},
           {"prompt", o.prompt},
           {"page_size", o.page_size},
           {"token_bytes", s.slot_bytes},
           {"ragged", out.ragged},
           {"events", between(s.events)},
           {"spans", between(s.spans)},
           {"folded", between(s.folded)},
           {"layers", Json::array()}};
  for (std::size_t l = 0; l < s.layers.size(); ++l) {
    const BoundedLayer& layer = s.layers[l];
    all["layers"].push_back({{"layer", l},
                             {"kind", kind_text(out.spec.layers[l].kind)},
                             {"full_slots", layer.full_slots},
                             {"full_bytes", layer.full_bytes},
                             {"peak_slots", between(layer.peak_slots)},
                             {"peak_bytes", between(layer.peak_bytes)},
                             {"kept_slots", between(layer.kept_slots)},
                             {"kept_bytes", between(layer.kept_bytes)},
                             {"far_bytes", between(layer.far_bytes)}});
  }
  all["own"] = own_json(out.own);
  const auto totals = [&](std::int64_t n) -> Json {
    return {{"full_bytes", s.full_bytes * n},
            {"peak_bytes", between(s.peak * n)},
            {"kept_bytes", between(s.kept * n)},
            {"far_bytes", between(s.far * n)},
            {"own_bytes", out.own.sum() * n}};
  };
  all["sequence"] = totals(1);
  all["total"] = totals(o.batch);
  all["sequences_that_fit"] = out.fits;
  return io::written(all, 2) + "\n";
}

std::string listed(const PlanOptions& o, const PlannedBounds& out) {
  Table table({{"what", ""},
               {"layer", ""},
               {"kind", ""},
               {"sequences", ""},
               {"full_bytes", ""},
               {"peak_bytes_least", ""},
               {"peak_bytes_most", ""},
               {"kept_bytes_least", ""},
               {"kept_bytes_most", ""},
               {"far_bytes_least", ""},
               {"far_bytes_most", ""},
               {"own_bytes", ""}});
  const Cell none(nullptr, "");
  const auto add = [&](const char* what, const Cell& layer, const Cell& kind, const Cell& sequences, std::int64_t full,
                       const Bounds& peak, const Bounds& kept, const Bounds& far, const Cell& own) {
    table.add(
        {what, layer, kind, sequences, full, peak.least, peak.most, kept.least, kept.most, far.least, far.most, own});
  };
  const BoundedForecast& s = out.sequence;
  for (std::size_t l = 0; l < s.layers.size(); ++l)
    add("layer", static_cast<std::int64_t>(l), kind_text(out.spec.layers[l].kind), none, s.layers[l].full_bytes,
        s.layers[l].peak_bytes, s.layers[l].kept_bytes, s.layers[l].far_bytes, none);
  const auto total = [&](const char* what, std::int64_t n) {
    add(what, none, none, n, s.full_bytes * n, s.peak * n, s.kept * n, s.far * n, out.own.sum() * n);
  };
  total("sequence", 1);
  total("batch", o.batch);
  total("fits", out.fits);
  return table.csv();
}

}  // namespace

std::string bounds_text(const PlanOptions& o, const PlannedBounds& out) {
  return o.output.format == Format::md    ? shown(o, out)
         : o.output.format == Format::csv ? listed(o, out)
                                          : written(o, out);
}

}  // namespace kvkeep::cli
