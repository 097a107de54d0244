# link_by_path(TARGET PATH...): links with libraries of which only their places are known. Users of the installed library
# need no package of CMake's for them; the property ANYRANK_LIBRARY_PATHS is what pkg-config tells them.
function(link_by_path target)
  target_link_libraries(${target} PRIVATE ${ARGN})
  set_property(GLOBAL APPEND PROPERTY ANYRANK_LIBRARY_PATHS ${ARGN})
endfunction()
