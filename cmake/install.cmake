# Installation: headers, the CMake package and the pkg-config file; everything is independent of the architecture.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(mdkv_package_dir "${CMAKE_INSTALL_DATADIR}/cmake/mdkv")
set(mdkv_pkgconfig_dir "${CMAKE_INSTALL_DATADIR}/pkgconfig")

if(CMAKE_VERSION VERSION_LESS 3.23)
    install(TARGETS mdkv mdkv_cuda EXPORT mdkvTargets)
    install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/mdkv" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh")
else()
    install(TARGETS mdkv EXPORT mdkvTargets FILE_SET HEADERS)
    install(TARGETS mdkv_cuda EXPORT mdkvTargets)
endif()
install(EXPORT mdkvTargets NAMESPACE mdkv:: DESTINATION "${mdkv_package_dir}")

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/mdkvConfig.cmake.in" "${PROJECT_BINARY_DIR}/mdkvConfig.cmake"
    INSTALL_DESTINATION "${mdkv_package_dir}" NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/mdkvConfigVersion.cmake"
    VERSION ${PROJECT_VERSION} COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES "${PROJECT_BINARY_DIR}/mdkvConfig.cmake" "${PROJECT_BINARY_DIR}/mdkvConfigVersion.cmake"
        DESTINATION "${mdkv_package_dir}")

file(RELATIVE_PATH mdkv_pc_to_prefix "/prefix/${mdkv_pkgconfig_dir}" "/prefix")
string(REGEX REPLACE "/$" "" mdkv_pc_to_prefix "${mdkv_pc_to_prefix}")
configure_file("${PROJECT_SOURCE_DIR}/cmake/mdkv.pc.in" "${PROJECT_BINARY_DIR}/mdkv.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/mdkv.pc" DESTINATION "${mdkv_pkgconfig_dir}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
