// The Python module: which instruction sets there are, and the kernels, bound in bind_encoders.cpp and bind_products.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "cpu.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace pagestone;

void bind_encoders(nb::module_& m);
void bind_products(nb::module_& m);

NB_MODULE(_kernels, m) {
    m.doc() = "Native kernels of pagestone.formats; use them through pagestone.formats.native.";
    m.def("isas", [] {
        std::vector<std::string> names;
        for (const Table* table : runnable()) names.emplace_back(table->name);
        return names;
    }, "Instruction sets that were compiled and that this CPU can run, the best one last.");
    m.def("isa", [] { return std::string(chosen().load()->name); }, "The instruction set in use.");
    m.def("set_isa", [](const std::string& name) {
        if (!choose(name.c_str())) throw nb::value_error(("this CPU cannot run " + name).c_str());
    }, "isa"_a, "Choose one of isas() for all further calls of the process.");
    bind_encoders(m);
    bind_products(m);
}
