# Where nvcc is, and why a build has no CUDA device. Works in script mode too (cmake -P), for its test.

# Sets `result` to nvcc, or to nothing where none is found.
function(find_nvcc result)
  if(CMAKE_CUDA_COMPILER)
    set(${result} ${CMAKE_CUDA_COMPILER} PARENT_SCOPE)
  elseif(DEFINED ENV{CUDACXX})
    set(${result} $ENV{CUDACXX} PARENT_SCOPE)
  else()
    # Toolkits are seldom on the PATH.
    find_program(ANYRANK_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda /opt/cuda PATH_SUFFIXES bin)
    mark_as_advanced(ANYRANK_NVCC)
    set(${result} "" PARENT_SCOPE)
    if(ANYRANK_NVCC)
      set(${result} ${ANYRANK_NVCC} PARENT_SCOPE)
    endif()
  endif()
endfunction()

# Sets `result` to one sentence for users: nvcc is what find_nvcc found, setting the value of ANYRANK_CUDA, problem why
# that nvcc will not do, or nothing.
function(why_no_cuda result nvcc setting problem)
  set(build "run ./quickstart --cuda, or configure with -DANYRANK_CUDA=ON")
  if(NOT nvcc)
    set(why "no CUDA toolkit was found when it was configured (no nvcc on the PATH, by CUDACXX or CUDA_HOME, or in \
/usr/local/cuda): install CUDA 12 or newer, and ${build}")
  elseif(problem)
    set(why "the CUDA toolkit of ${nvcc} cannot be used: ${problem}: when that is mended, ${build}")
  else()
    set(why "it was configured with -DANYRANK_CUDA=${setting}, although a CUDA toolkit was there (${nvcc}): to have it, ${build}")
  endif()
  set(${result} ${why} PARENT_SCOPE)
endfunction()
