// What the parts of the runtime share: threads of the current threadgroup, buffers, reports, counts.
#pragma once
#include <cstddef>
#include <cstdint>

#include "interface.h"

constexpr int LANES = 32, MAX_THREADS = 1024, MAX_SIMDGROUPS = MAX_THREADS / LANES, MAX_BUFFERS = 64;
constexpr size_t SLOT_BYTES = 64, STACK_BYTES = 256 << 10, GUARD_BYTES = 4096 * 4, ARENA_BYTES = 128 << 10;
constexpr size_t MESSAGE_BYTES = 240;
constexpr int MAX_REPORTS = 64;

enum Kind {  // metal/cpu/report.py has the names in the same order
  OUT_OF_BOUNDS = 1, RACE, UNINITIALISED, BARRIER_DIVERGES, SIMD_DIVERGES, THREADGROUP_MEMORY, READ_ONLY, BAD_LANE,
  UNDEFINED, ENDLESS, NEVER_WRITTEN
};
enum Build { FAST, CHECKED, PRIVATE };
enum Wait { RUNNABLE, AT_BARRIER, AT_SIMD, RETURNED };

// Where in the kernel an operation stands: the innermost return address, and a hash of the whole chain.
struct Site { uint64_t pc = 0, chain = 0; };

struct Fiber { GpuThread thread; void* stack_pointer; Wait wait; Site site; };

struct Simdgroup {
  int alive, arrived, operation, members[LANES];
  Site site;
  uint32_t waiting, took_part, phase;
  uint32_t epoch_threadgroup, epoch_device;  // count simdgroup barriers per kind of memory
};

struct Report { int kind; unsigned group, thread; uint64_t pc, other_pc; char message[MESSAGE_BYTES]; };

// Shadow of one byte of threadgroup memory or of a buffer that may be written. Epochs count from 1; 0 is never.
struct Cell {
  uint32_t write_epoch, read_epoch, write_simd_epoch, read_simd_epoch, write_group, read_group;
  int16_t write_thread, read_thread;  // read_thread -1: several threads of one simdgroup
  int16_t read_simdgroup;             // -1: several simdgroups
  uint16_t written;
};

struct Buffer {
  uintptr_t base; size_t size; bool writable, filled; size_t mapped;
  uint64_t read, written, group_unique;
  uint32_t* seen;  // per byte: the last threadgroup that read it, from 1
  Cell* cells;
};

// Mirrors of the structures in metal/cpu/launch.py.
struct LaunchDescription {
  void (*entry)(void**);
  int32_t buffers, build;  // FAST, CHECKED or PRIVATE
  uint64_t base[MAX_BUFFERS], size[MAX_BUFFERS];
  int32_t writable[MAX_BUFFERS], filled[MAX_BUFFERS];
  uint32_t grid[3], threadgroup[3];
  uint64_t threadgroup_limit, seed;
  uint32_t cpu_seconds;
};
struct LaunchCounts {
  uint64_t read[MAX_BUFFERS], written[MAX_BUFFERS], unique[MAX_BUFFERS], group_unique[MAX_BUFFERS];
  uint64_t threadgroup_bytes, threadgroup_read, threadgroup_written, barriers, simdgroup_barriers, simd_operations;
  uint64_t groups;
  int32_t reports;
};

struct Runtime {
  Fiber fibers[MAX_THREADS];
  Simdgroup simdgroups[MAX_SIMDGROUPS];
  Buffer buffers[MAX_BUFFERS];
  Report reports[MAX_REPORTS];
  LaunchCounts counts;
  int current = -1, threads = 0, returned = 0, buffer_count = 0;
  uint32_t group = 0, epoch_threadgroup = 0, epoch_device = 0;
  size_t threadgroup_limit = 0;
  bool checked = false, watches_private = false, aborted = false;
  char* stacks = nullptr;
  Fiber& self() { return fibers[current]; }
  Simdgroup& simdgroup() { return simdgroups[self().thread.simdgroup]; }
  char* stack_of(int thread) { return stacks + (STACK_BYTES + GUARD_BYTES) * thread + GUARD_BYTES; }
};
extern Runtime runtime;

void report(Kind kind, uint64_t pc, uint64_t other_pc, const char* format, ...) __attribute__((format(printf, 4, 5)));
[[noreturn]] void abandon_launch();  // leaves the current fiber for good

// memory.cpp
void memory_begin_launch(const LaunchDescription& launch);
void memory_begin_group();
void memory_end_launch();

// private.cpp
void private_flush();                                                 // checks the last store
void private_check(const void* value, size_t bytes, uint64_t pc);  // checks what is handed to other lanes
