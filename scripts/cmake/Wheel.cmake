# What the Python package contains besides its modules: pyproject.toml installs the component "python", and no other
# installation has it. The command finds its data at ../share/anyrank (ref/io/data_dir.c).
install(FILES ${CMAKE_BINARY_DIR}/python/VERSION DESTINATION anyrank COMPONENT python)
install(TARGETS anyrank_cli RUNTIME DESTINATION anyrank/bin COMPONENT python)
install(TARGETS anyrank_abi LIBRARY DESTINATION anyrank/lib COMPONENT python)
install(DIRECTORY ref/data/ DESTINATION anyrank/share/anyrank COMPONENT python)
