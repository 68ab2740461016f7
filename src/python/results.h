// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What calls of the Keeper return, for Python.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kvkeep/core/error.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/parts/prompts.h"

namespace kvkeep::python {

namespace nb = nanobind;

/// "Cut(sequence=7, ...)": every member of a result.
inline std::string members_of(nb::handle self) {
  std::string all;
  for (const nb::handle name : self.type().attr("__dict__")) {
    const auto said = nb::cast<std::string>(name);
    if (!said.starts_with('_'))
      all += text(all.empty() ? "" : ", ", said, "=", nb::repr(nb::object(self.attr(said.c_str()))).c_str());
  }
  return text(nb::cast<std::string>(self.type().attr("__name__")), "(", all, ")");
}

template <class Result>
nb::class_<Result> result(nb::module_& m, const char* name, const char* what) {
  return nb::class_<Result>(m, name, what).def("__repr__", &members_of);
}

inline void bind_results(nb::module_& m) {
  result<Cut>(m, "Cut", "What an event did to one sequence. Lengths are those of its longest row.")
      .def_ro("sequence", &Cut::sequence)
      .def_ro("logical_length", &Cut::logical_length, "tokens seen")
      .def_ro("length_before", &Cut::length_before)
      .def_ro("length_after", &Cut::length_after)
      .def_ro("slots_before", &Cut::slots_before, "over all its rows")
      .def_ro("slots_after", &Cut::slots_after)
      .def_ro("slots_chosen", &Cut::slots_chosen, "of slots_after, by the scorer");
  result<PageMove>(m, "PageMove", "The pages that a cut sequence now holds, and those it gave back.")
      .def_ro("index", &PageMove::sequence, "of the sequence in the step")
      .def_ro("held", &PageMove::after)
      .def_ro("written", &PageMove::written, "those of `held` whose slots the event rewrote")
      .def_ro("freed", &PageMove::freed);
  result<Unscored>(m, "Unscored", "A sequence that was due and was not cut: a query of it is not finite.")
      .def_ro("sequence", &Unscored::sequence)
      .def_ro("layer", &Unscored::layer)
      .def_ro("position", &Unscored::position);
  result<Report>(m, "Report", "What a step did.")
      .def_ro("cuts", &Report::cuts)
      .def_ro("pages", &Report::pages)
      .def_ro("unscored", &Report::unscored)
      .def_ro("slots_kept", &Report::slots_kept, "at events")
      .def_ro("slots_chosen", &Report::slots_chosen, "of slots_kept, by the scorer")
      .def_ro("slots_dropped", &Report::slots_dropped)
      .def_ro("slots_folded", &Report::slots_folded)
      .def_ro("far_bytes", &Report::far_bytes)
      .def_ro("bytes_before", &Report::bytes_before)
      .def_ro("bytes_after", &Report::bytes_after)
      .def_ro("bytes_moved", &Report::bytes_moved)
      .def_ro("pages_freed", &Report::pages_freed);
  result<Narrowing>(m, "Narrowing", "What one layer did to one prompt.")
      .def_ro("sequence", &Narrowing::sequence)
      .def_ro("tokens", &Narrowing::tokens, "places of those that continue; None: all do")
      .def_ro("restart", &Narrowing::restart, "the sequence starts over, with these tokens as its prompt")
      .def_ro("slots_dropped", &Narrowing::slots_dropped);
  result<LayerReport>(m, "LayerReport", "What one layer did to the prompts of a step.")
      .def_ro("prompts", &LayerReport::prompts)
      .def_ro("pages", &LayerReport::pages);
  result<Totals>(m, "Totals", "Counters since the keeper was made.")
      .def_ro("steps", &Totals::steps)
      .def_ro("events", &Totals::events)
      .def_ro("sequences_cut", &Totals::sequences_cut)
      .def_ro("slots_kept", &Totals::slots_kept, "at events")
      .def_ro("slots_chosen", &Totals::slots_chosen, "of slots_kept, by the scorer")
      .def_ro("slots_dropped", &Totals::slots_dropped)
      .def_ro("bytes_moved", &Totals::bytes_moved)
      .def_ro("pages_freed", &Totals::pages_freed)
      .def_ro("slots_folded", &Totals::slots_folded)
      .def_ro("unscored", &Totals::unscored, "sequences that were due and were not cut, at each step anew");
}

}  // namespace kvkeep::python
