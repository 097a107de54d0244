# add_one_object(TARGET OBJECTS): makes one object file of those of the object library OBJECTS, in C++ or CUDA, and adds
# it to TARGET. CMake sees a file that it knows no language of: what is linked with TARGET, here and by users of the
# installed library, is linked as C and needs neither a C++ compiler nor its run-time library.
function(add_one_object target objects)
  set(file ${CMAKE_BINARY_DIR}/${objects}${CMAKE_C_OUTPUT_EXTENSION})
  add_custom_command(OUTPUT ${file}
    COMMAND ${CMAKE_C_COMPILER} -r -nostdlib -o ${file} $<TARGET_OBJECTS:${objects}>
    DEPENDS ${objects} $<TARGET_OBJECTS:${objects}> COMMAND_EXPAND_LISTS VERBATIM COMMENT "Joining ${objects}")
  add_custom_target(${objects}_object DEPENDS ${file})
  add_dependencies(${target} ${objects}_object)
  target_sources(${target} PRIVATE ${file})
  set_source_files_properties(${file} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
endfunction()
