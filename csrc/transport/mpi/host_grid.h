// How the hosts that exchange a slice are arranged: in rows of neighbouring hosts, as many rows as columns or about so.
//
// With one row each host exchanges with each other host: 2 (h - 1) messages each way for h hosts. With several rows it
// exchanges with the hosts of its row, and with a host of each other row: about 4 sqrt(h) messages each way, in four
// steps instead of two. No value crosses a link more often. (Two dimensions of the torus of Jain and Sabharwal,
// "Optimal bucket algorithms for large MPI collectives on torus interconnects", 2010, with messages sent directly in
// each dimension.)
#pragma once

#include <cstddef>

namespace mykv {

class HostGrid {
 public:
  HostGrid(size_t hosts, size_t rows) : hosts_(hosts), rows_(rows) {}
  // With about as many rows as columns, and if possible with rows of equal length.
  static HostGrid square(size_t hosts);

  size_t rows() const { return rows_; }
  // Hosts of the longest row; other rows have one host less at most.
  size_t columns() const { return (hosts_ + rows_ - 1) / rows_; }
  // Rows are hosts [begin(row), begin(row + 1)).
  size_t begin(size_t row) const { return hosts_ * row / rows_; }
  size_t row_of(size_t host) const { return ((host + 1) * rows_ - 1) / hosts_; }
  size_t width(size_t row) const { return begin(row + 1) - begin(row); }
  // The host of a row that reduces a column. In a shorter row the first host has two columns.
  size_t host(size_t row, size_t column) const { return begin(row) + column % width(row); }

 private:
  size_t hosts_;
  size_t rows_;
};

}  // namespace mykv
