"""Units and currencies: their signs and their names in four languages; one table for all."""

import re
from typing import NamedTuple


class Unit(NamedTuple):
    """The names of a unit; "" in a language that leaves its letters as they are."""

    one: str
    many: str
    zh: str = ""
    ja: str = ""
    ko: str = ""
    cent: str = ""  # a hundredth of a currency, in English


# Rows, between semicolons: signs | English, one (/many) | Chinese | Japanese | Korean | hundredth in English (/many).
_CURRENCIES = """
$ USD|dollar|美元|ドル|달러|cent ; US$|US dollar|美元|ドル|달러|cent
C$ CA$ CAD|Canadian dollar|加元|カナダドル|캐나다 달러|cent ; A$ AU$ AUD|Australian dollar|澳元|豪ドル|호주 달러|cent
NZ$ NZD|New Zealand dollar|新西兰元|ニュージーランドドル|뉴질랜드 달러|cent
S$ SGD|Singapore dollar|新加坡元|シンガポールドル|싱가포르 달러|cent
HK$ HKD|Hong Kong dollar|港元|香港ドル|홍콩 달러|cent ; NT$ TWD|Taiwan dollar|新台币|台湾ドル|대만 달러|cent
€ EUR|euro|欧元|ユーロ|유로|cent ; £ GBP|pound|英镑|ポンド|파운드|penny/pence ; ¥|yen/yen|元|円|엔
JPY|yen/yen|日元|円|엔 ; ￥ CNY RMB|yuan/yuan|元|円|위안 ; ₹ INR|rupee|卢比|ルピー|루피|paisa/paise
₩ KRW|won/won|韩元|ウォン|원 ; ₽ RUB|ruble|卢布|ルーブル|루블|kopeck
CHF|Swiss franc|瑞士法郎|スイスフラン|스위스 프랑 ; ¢|cent|美分|セント|센트
"""
# Signs: prefixes | names as above.
_UNITS = """
m:k c d m n μ µ|meter|米|メートル|미터 ; g:k m μ µ|gram|克|グラム|그램 ; L l:m d|liter|升|リットル|리터
W:k M G m|watt|瓦|ワット|와트 ; Wh:k M|watt hour|瓦时|ワット時|와트시 ; V:k|volt|伏|ボルト|볼트
!A:m|amp|安|アンペア|암페어 ; !Ah:m|amp hour|安时|アンペア時|암페어시 ; Hz:k M G|hertz/hertz|赫兹|ヘルツ|헤르츠
Pa:k M h|pascal|帕|パスカル|파스칼 ; !J:k|joule|焦|ジュール|줄 ; !B:k K M G T|byte||バイト|바이트
!bps:k M G|bit/bits per second ; cal:k|calorie|卡|カロリー|칼로리 ; mol:m|mole|摩尔|モル|몰 ; Ω:k|ohm|欧|オーム|옴
s:m|second|秒|秒|초 ; sec secs|second ; min mins|minute|分钟|分|분 ; h|hour|小时|時間|시간 ; hr hrs|hour ; yr yrs|year
mo|month ; wk wks|week ; t||吨|トン|톤 ; dB|decibel|分贝|デシベル|데시벨 ; ft|foot/feet|英尺|フィート|피트
mi|mile|英里|マイル|마일 ; yd|yard ; lb lbs|pound|磅|ポンド|파운드 ; oz|ounce|盎司|オンス|온스 ; fl_oz|fluid ounce
gal|gallon ; tbsp|tablespoon ; tsp|teaspoon ; sq_ft sq._ft.|square foot/square feet
sq_mi mi²|square mile|平方英里|平方マイル|제곱마일 ; ha|hectare|公顷|ヘクタール|헥타르
atm|atmosphere|个大气压|気圧|기압 ; mmHg|millimeter/millimeters of mercury|毫米汞柱
mph|mile/miles per hour|英里每小时 ; kph kmh|kilometer/kilometers per hour|公里每小时
rpm|revolution/revolutions per minute|转每分钟 ; fps|frame/frames per second|帧每秒
bpm|beat/beats per minute|次每分钟 ; psi|pound/pounds per square inch ; ppm|part/parts per million ; pts|point
px|pixel|像素 ; % ％|percent/percent|百分之|パーセント|퍼센트 ; ‰|per mille/per mille|千分之|パーミル|퍼밀
"""
_PREFIXES = {
    "k": ("kilo", "千", "キロ", "킬로"), "M": ("mega", "兆", "メガ", "메가"), "G": ("giga", "吉", "ギガ", "기가"),
    "T": ("tera", "太", "テラ", "테라"), "h": ("hecto", "百", "ヘクト", "헥토"), "d": ("deci", "分", "デシ", "데시"),
    "c": ("centi", "厘", "センチ", "센티"), "m": ("milli", "毫", "ミリ", "밀리"), "μ": ("micro", "微", "マイクロ", "마이크로"),
    "n": ("nano", "纳", "ナノ", "나노"),
}  # fmt: skip
_PREFIXES |= {"K": _PREFIXES["k"], "µ": _PREFIXES["μ"]}
_CHINESE = {"km": "公里", "kg": "公斤"}  # that are said so, and not by their prefix
_SQUARED = ("km", "cm", "mm", "m", "ft")


def _named(names: str) -> Unit:
    english, *others = names.split("|")
    one, _, many = english.partition("/")
    return Unit(one, many or f"{one}s", *others)


def _units() -> dict[str, Unit]:
    found = dict[str, Unit]()
    for row in re.split(" ; |\n", _UNITS.strip()):
        signs, _, names = row.partition("|")
        signs, _, prefixes = signs.partition(":")
        unit = _named(names)
        for sign in signs.replace("!", "").split():
            if signs[0] != "!":  # alone it is rather a letter
                found[sign.replace("_", " ")] = unit
            for prefix in prefixes.split():
                more = (_PREFIXES[prefix][0], *_PREFIXES[prefix])
                found[prefix + sign] = Unit(*(name and before + name for before, name in zip(more, unit, strict=False)))
    for sign, chinese in _CHINESE.items():
        found[sign] = found[sign]._replace(zh=chinese)
    for sign in _SQUARED:
        for power, words in (("2²", ("square ", "平方", "平方", "제곱")), ("3³", ("cubic ", "立方", "立方", "세제곱"))):
            for mark in power:
                found[sign + mark] = Unit(*map(str.__add__, (words[0], *words), found[sign]))
    return found


UNITS = _units()
CURRENCIES = {
    sign: _named(names)
    for row in re.split(" ; |\n", _CURRENCIES.strip())
    for signs, _, names in (row.partition("|"),)
    for sign in signs.split()
}


def one_of(signs: list[str]) -> str:
    """Return a pattern of any of `signs`, the longest first."""
    return "|".join(re.escape(sign) for sign in sorted(signs, key=len, reverse=True))


CURRENCY = one_of(list(CURRENCIES))
