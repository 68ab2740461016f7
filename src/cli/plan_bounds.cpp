// SPDX-License-Identifier: Apache-2.0
// The tables of kvkeep plan where the text decides how much is held: the least and the most.

#include "plan.h"

namespace kvkeep::cli {
namespace {

using Json = nlohmann::ordered_json;

Cell range_cell(const Bounds& bytes) {
  return bytes.least == bytes.most
             ? bytes_cell(bytes.most)
             : Cell(bytes.most, text(bytes_cell(bytes.least).shown, " - ", bytes_cell(bytes.most).shown));
}

using PlannedBounds = Planned<BoundedForecast>;

// Bytes are per layer.
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
  each_run(out, [&](const std::string& layers, const char* kind, const BoundedLayer& layer) {
    table.add({layers, kind, layer.full_slots, bytes_cell(layer.full_bytes), slots_text(layer.peak_slots),
               range_cell(layer.peak_bytes), slots_text(layer.kept_slots), range_cell(layer.kept_bytes),
               range_cell(layer.far_bytes)});
  });
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
  std::string head =
      text(token_text(o, s.slot_bytes), out.policy.name(),
           ": the text decides what it holds, between these bounds. Events: ", slots_text(s.events), ".\n");
  if (out.policy.memory() != nullptr)
    head += text("Folded at the end, over all layers and heads: ", slots_text(s.folded), " slots in ",
                 slots_text(s.spans), " spans.\n");
  if (out.ragged) head += "Rows may end up unequal; slots are those of an average row.\n";
  return text(head, "\n", layers_between(out).markdown(), "\n", totals_between(o, out).markdown(),
              room_text(o, out.fits), " at the most that they hold.\n");
}

Json between(const Bounds& bounds) { return {{"least", bounds.least}, {"most", bounds.most}}; }

std::string written(const PlanOptions& o, const PlannedBounds& out) {
  const BoundedForecast& s = out.sequence;
  return json_text(
      o, out, {{"events", between(s.events)}, {"spans", between(s.spans)}, {"folded", between(s.folded)}},
      [](const BoundedLayer& layer) -> Json {
        return {{"full_slots", layer.full_slots},          {"full_bytes", layer.full_bytes},
                {"peak_slots", between(layer.peak_slots)}, {"peak_bytes", between(layer.peak_bytes)},
                {"kept_slots", between(layer.kept_slots)}, {"kept_bytes", between(layer.kept_bytes)},
                {"far_bytes", between(layer.far_bytes)}};
      },
      [&](std::int64_t n) -> Json {
        return {{"full_bytes", s.full_bytes * n},
                {"peak_bytes", between(s.peak * n)},
                {"kept_bytes", between(s.kept * n)},
                {"far_bytes", between(s.far * n)}};
      });
}

std::string listed(const PlanOptions& o, const PlannedBounds& out) {
  Table table(columns_of({"what", "layer", "kind", "sequences", "full_bytes", "peak_bytes_least", "peak_bytes_most",
                          "kept_bytes_least", "kept_bytes_most", "far_bytes_least", "far_bytes_most", "own_bytes"}));
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
