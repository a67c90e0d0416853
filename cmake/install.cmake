# Installation: headers, the CMake package and the pkg-config file; everything is independent of the architecture.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(mdkv_package_dir "${CMAKE_INSTALL_DATADIR}/cmake/mdkv")
set(mdkv_pkgconfig_dir "${CMAKE_INSTALL_DATADIR}/pkgconfig")

# Not by a file set: CMake 3.25 exports it with the prefix before an absolute CMAKE_INSTALL_INCLUDEDIR.
target_include_directories(mdkv INTERFACE "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
install(TARGETS mdkv mdkv_cuda EXPORT mdkvTargets)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/mdkv" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh")
install(EXPORT mdkvTargets NAMESPACE mdkv:: DESTINATION "${mdkv_package_dir}")

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/mdkvConfig.cmake.in" "${PROJECT_BINARY_DIR}/mdkvConfig.cmake"
    INSTALL_DESTINATION "${mdkv_package_dir}" NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/mdkvConfigVersion.cmake"
    VERSION ${PROJECT_VERSION} COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES "${PROJECT_BINARY_DIR}/mdkvConfig.cmake" "${PROJECT_BINARY_DIR}/mdkvConfigVersion.cmake"
        DESTINATION "${mdkv_package_dir}")

# mdkv.pc finds the prefix from its own folder, so that an installation works wherever it was moved to. Folders that are given as
# absolute paths stay where they are.
set(mdkv_pc_prefix "${CMAKE_INSTALL_PREFIX}")
if(NOT IS_ABSOLUTE "${mdkv_pkgconfig_dir}")
    file(RELATIVE_PATH mdkv_pc_prefix "/prefix/${mdkv_pkgconfig_dir}" "/prefix")
    string(REGEX REPLACE "/$" "" mdkv_pc_prefix "\${pcfiledir}/${mdkv_pc_prefix}")
endif()
set(mdkv_pc_includes "${CMAKE_INSTALL_INCLUDEDIR}")
if(NOT IS_ABSOLUTE "${mdkv_pc_includes}")
    string(PREPEND mdkv_pc_includes "\${prefix}/")
endif()
string(REPLACE " " "\\ " mdkv_pc_prefix "${mdkv_pc_prefix}")
string(REPLACE " " "\\ " mdkv_pc_includes "${mdkv_pc_includes}")
configure_file("${PROJECT_SOURCE_DIR}/cmake/mdkv.pc.in" "${PROJECT_BINARY_DIR}/mdkv.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/mdkv.pc" DESTINATION "${mdkv_pkgconfig_dir}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
