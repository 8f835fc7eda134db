#include "runtime/recording.h"

#include <ostream>

namespace npu {

void Recording::write_dot(std::ostream& out) const {
  out << "digraph npu {\n";
  for (size_t i = 0; i < nodes_.size(); ++i) {
    out << "  n" << i << " [label=\"" << nodes_[i]->name() << "\"];\n";
    if (i) out << "  n" << i - 1 << " -> n" << i << ";\n";
  }
  out << "}\n";
}

}  // namespace npu
