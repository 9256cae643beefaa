/* Coefficients of the elementary functions, the highest power first.

   kernels.c and functions.py both read them from here. They interpolate each function at Chebyshev
   points, computed with 300 bits; errors are below 4e-17 of the function. */

/* (exp(x) - 1) / x, |x| <= log(2) / 2 */
static const double EXPM1[] = {
    0x1.1f7f2776cfaf2p-29, 0x1.af632a0f7e2cep-26, 0x1.27e4d41966f2fp-22, 0x1.71ddf56d8deb5p-19,
    0x1.a01a01a9e991bp-16, 0x1.a01a01b1461c5p-13, 0x1.6c16c16c15a68p-10, 0x1.111111110f21ep-7,
    0x1.5555555555557p-5, 0x1.555555555555ap-3, 0x1.0000000000000p-1, 0x1.0000000000000p+0
};
/* atanh(x) / x by x * x, |x| <= 0.172 */
static const double ATANH[] = {
    0x1.0fca317f093bap-4, 0x1.0f50858d17761p-4, 0x1.3b2144d4bfec9p-4, 0x1.745cda40bfb82p-4,
    0x1.c71c7267d1847p-4, 0x1.249249241b952p-3, 0x1.9999999999f16p-3, 0x1.5555555555555p-2,
    0x1.0000000000000p+0
};
/* atan(x) / x by x * x, |x| <= tan(pi / 8) */
static const double ATAN[] = {
    0x1.eee92aec78e3dp-7, -0x1.116e0539ae63cp-5, 0x1.70902a1349136p-5, -0x1.ab64b24b6b4fcp-5,
    0x1.e16dc8f26a5c0p-5, -0x1.110c35c58fd7cp-4, 0x1.3b13698605b24p-4, -0x1.745d147cfa94cp-4,
    0x1.c71c71b54854ap-4, -0x1.24924924703acp-3, 0x1.999999999955ep-3, -0x1.5555555555554p-2,
    0x1.0000000000000p+0
};
/* sin(x) / x by x * x, |x| <= pi / 4 */
static const double SIN[] = {
    -0x1.aa9acc354cef6p-41, 0x1.61207ad10bb21p-33, -0x1.ae64526cc17c6p-26, 0x1.71de3a531129ep-19,
    -0x1.a01a01a018867p-13, 0x1.111111111110ap-7, -0x1.5555555555555p-3, 0x1.0000000000000p+0
};
/* cos(x) by x * x, |x| <= pi / 4 */
static const double COS[] = {
    0x1.aa9ac6780961cp-45, -0x1.9392ca812026cp-37, 0x1.1eed8c30cb44ap-29, -0x1.27e4fb757f1afp-22,
    0x1.a01a01a01842bp-16, -0x1.6c16c16c16c09p-10, 0x1.5555555555555p-5, -0x1.0000000000000p-1,
    0x1.0000000000000p+0
};
/* erf(x) / x by x * x, |x| <= 1 */
static const double ERF[] = {
    -0x1.29b9f1b3df556p-38, 0x1.7f072188e194dp-34, -0x1.4e607b41a6416p-30, 0x1.fc4356498c2d9p-27,
    -0x1.5f6d925a0bc7ap-23, 0x1.b9e6509b9867dp-20, -0x1.f4d2561aeafd4p-17, 0x1.f9a326c233146p-14,
    -0x1.c02db3feeb579p-11, 0x1.565bcd0e6502dp-8, -0x1.b82ce312889bap-6, 0x1.ce2f21a042bdep-4,
    -0x1.812746b0379e7p-2, 0x1.20dd750429b6dp+0
};
/* log(erfc(x) exp(x * x) / t) by 2 t - 1 where t = 2 / (2 + x), x >= 0 */
static const double ERFC[] = {
    0x1.16f242fee270fp-28, -0x1.bee2edc6fce5ep-30, -0x1.50542b37b2ab3p-25, 0x1.574dd2db7ea89p-25,
    0x1.4924c5c03db53p-23, -0x1.54eabd9a2106ep-22, -0x1.697e2a4009c10p-23, 0x1.6470cc6efe336p-20,
    -0x1.55982de5b1cd5p-20, -0x1.93d308644832ap-19, 0x1.1f52217b20741p-17, 0x1.6e7b5e4a62f1cp-23,
    -0x1.fa78828386d54p-16, 0x1.0a319a5d35ec3p-15, 0x1.2b7a4f4add75ap-14, -0x1.6d887698d5e47p-13,
    -0x1.89273cf987b29p-14, 0x1.6133905f25e8bp-11, -0x1.32b3af85a4751p-13, -0x1.337867718cb85p-9,
    0x1.cd18086c0f5a9p-10, 0x1.212cf33d05bcdp-7, -0x1.43821ef9e03c1p-7, -0x1.802b3908970e4p-5,
    0x1.83d61c52414d3p-5, 0x1.5864b151b8568p-1, -0x1.57f564e956ebep-1
};
/* erfinv(x) / x by w - 2.5 where w = -log(1 - x * x) < 5 (Giles 2012), to 7 digits */
static const double ERFINV[] = {
    0x1.e2cb0ff8247eap-26, 0x1.70966bff10cbdp-22, -0x1.d8e6adf666a10p-19, -0x1.26b5820448e6fp-18,
    0x1.ca65b60594a34p-13, -0x1.48a8100213441p-10, -0x1.11c9de0453890p-8, 0x1.f91ec6029d022p-3,
    0x1.805c5df9db4dcp+0
};
/* The same by sqrt(w) - 3, w >= 5 */
static const double ERFINV_TAIL[] = {
    -0x1.a3e135f3c6ebep-13, 0x1.a76ad6167e931p-14, 0x1.61b8e40100b9fp-10, -0x1.e17bce072a85dp-9,
    0x1.7824f5fed8615p-8, -0x1.f38badff9f607p-8, 0x1.354afbfd6b130p-7, 0x1.006db610f3984p+0,
    0x1.6a9efc041cf02p+1
};
/* pi / 2 in three parts; the first two have at most 33 bits */
static const double HALF_PI[] = {
    0x1.921fb54400000p+0, 0x1.0b4611a600000p-34, 0x1.3198a2e037073p-69
};
/* log(2) in two parts; the first has 32 bits */
static const double LOG2[] = {
    0x1.62e42fee00000p-1, 0x1.a39ef35793c76p-33
};
/* The first 1,280 bits of 2 / pi after the point */
static const uint64_t TWO_OVER_PI[] = {
    0xa2f9836e4e441529, 0xfc2757d1f534ddc0, 0xdb6295993c439041, 0xfe5163abdebbc561,
    0xb7246e3a424dd2e0, 0x06492eea09d1921c, 0xfe1deb1cb129a73e, 0xe88235f52ebb4484,
    0xe99c7026b45f7e41, 0x3991d639835339f4, 0x9c845f8bbdf9283b, 0x1ff897ffde05980f,
    0xef2f118b5a0a6d1f, 0x6d367ecf27cb09b7, 0x4f463f669e5fea2d, 0x7527bac7ebe5f17b,
    0x3d0739f78a5292ea, 0x6bfb5fb11f8d5d08, 0x56033046fc7b6bab, 0xf0cfbc209af4361d
};
