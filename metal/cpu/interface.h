// What a kernel that was compiled from Metal source and the runtime know of each other: plain C types only.
//
// No call carries a line number. The runtime takes the return addresses of the caller and of all its callers as the
// identity of an operation, so two barriers on one line, and one helper that is called from two places, are told
// apart. Hence `nomerge` and `convergent`: the compiler may neither join two such calls nor split one.
#pragma once

#define GPU_CALL __attribute__((nomerge, convergent))

extern "C" {

struct GpuThread {  // one GPU thread; its fiber reads this through gpu_self()
  unsigned position_in_grid[3], group_in_grid[3], position_in_group[3];
  unsigned threads_per_grid[3], threads_per_group[3], full_threads_per_group[3], groups_per_grid[3];
  unsigned index_in_group, lane, simdgroup, simdgroups, full_simdgroups, lanes_in_simdgroup;
};

GpuThread* gpu_self();

// The barriers of a threadgroup and of a simdgroup; `flags` are mem_flags (1 device, 2 threadgroup).
GPU_CALL void gpu_threadgroup_barrier(int flags);
GPU_CALL void gpu_simdgroup_barrier(int flags);

// A collective operation: hands in `bytes` of a value (at most 64), waits for all live lanes of the simdgroup, and
// returns their 32 slots, 64 bytes apart, with the mask of the lanes that took part.
GPU_CALL const char* gpu_exchange(int operation, const void* value, unsigned bytes, unsigned* mask);

// Storage of one `threadgroup` declaration, the same for all threads of the threadgroup.
void* gpu_threadgroup_memory(int declaration, unsigned long bytes, unsigned long align, const char* name);

// Reports a lane number that is outside the simdgroup or not active.
void gpu_bad_lane(const char* what);
}
