# The CUDA device, where nvcc is found, and its kernels compiled for the host, where a C++ compiler is. gpu/absent.c
# stands for what is missing.
include(CheckLanguage)
include(OneObject)
set(ANYRANK_HAVE_CUDA 0)
set(ANYRANK_HAVE_EMULATED 0)
if(ANYRANK_EMULATED)
  check_language(CXX)
  if(CMAKE_CXX_COMPILER)
    enable_language(CXX)
    add_subdirectory(gpu/emulated)
    add_one_object(anyrank anyrank_emulated)
    set(ANYRANK_HAVE_EMULATED 1)
  endif()
endif()
message(STATUS "CUDA device: ${ANYRANK_HAVE_CUDA}; its kernels on the host: ${ANYRANK_HAVE_EMULATED}")
set_property(SOURCE gpu/absent.c APPEND PROPERTY COMPILE_DEFINITIONS
  ANYRANK_HAVE_CUDA=${ANYRANK_HAVE_CUDA} ANYRANK_HAVE_EMULATED=${ANYRANK_HAVE_EMULATED})
