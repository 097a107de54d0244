# Finds NCCL's header and library: they come without a package of CMake's. NCCL_HOME says where they may be. The library
# is loaded at run time and never linked; what knows NCCL by its header (a test compares ours with it) is built where
# this finds it. Defines NCCL_FOUND, NCCL_VERSION, NCCL_INCLUDE_DIR and NCCL_LIBRARY.
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ENV NCCL_HOME PATHS /usr/local/cuda /opt/cuda PATH_SUFFIXES include)
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ENV NCCL_HOME PATHS /usr/local/cuda /opt/cuda
  PATH_SUFFIXES lib lib64)
if(NCCL_INCLUDE_DIR)
  file(STRINGS ${NCCL_INCLUDE_DIR}/nccl.h numbers REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) [0-9]+$")
  string(REGEX REPLACE "#define NCCL_[A-Z]+ " "" numbers "${numbers}")
  list(JOIN numbers "." NCCL_VERSION)
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR VERSION_VAR NCCL_VERSION)
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)
